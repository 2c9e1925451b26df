"""The subcommands of ``setpoint`` that combine several rooms, with one file for each."""
