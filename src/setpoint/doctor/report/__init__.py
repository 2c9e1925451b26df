"""What people see of a report: the terminal, a page, and the texts of the checks."""
