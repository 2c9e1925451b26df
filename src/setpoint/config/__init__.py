"""Declares, parses and resolves every option, each with a reason. Knows devices and models only as
plain data."""
