"""The subcommands of ``setpoint`` that combine several packages, with one file for each."""
