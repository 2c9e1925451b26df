"""Model declarations, the table of architectures, and the loader that fills a model's weights."""
