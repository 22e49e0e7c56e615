"""The wire contract: messages, services, and the few rules that both ends of a channel must share."""
