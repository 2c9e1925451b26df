"""From logits to tokens, in batches: penalties, masks, truncation, seeded draws and logprobs."""
