"""The console: a page that shows the server live, and the stream of events that feeds it
(docs/console.md)."""
