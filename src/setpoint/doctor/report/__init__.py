"""Shows reports to people: in the terminal, as a page, and the texts of the checks."""
