"""The fields of the bodies of OpenAI's API, for all modules that read such bodies."""
