"""Measurements: a load generator for any OpenAI-compatible server, and a script for each comparison that Quire claims.

A comparison runs both of its sides in turn, in one run, and prints medians with their spread.
"""
