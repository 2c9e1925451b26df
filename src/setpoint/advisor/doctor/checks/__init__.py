"""The checks: one file for each cause, with its rule, its source in the guides and its
counter-evidence."""
