"""The pages of the REST API, one module for each subject."""
