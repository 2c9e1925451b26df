"""The subcommands of ``setpoint`` that put several rooms together: one file for each."""
