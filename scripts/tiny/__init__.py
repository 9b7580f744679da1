"""The world of the bundled model: what it knows, how it is drawn and spoken, and how the model learns it."""
