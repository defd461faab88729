"""Data: sources (`sources`), the TL;DR query (`tldr`), tokens (`tokenize`), batches (`batching`), the demo corpus."""
