"""What the frontend measures and reports: times, counts, logs, spans, the requests that are
open."""
