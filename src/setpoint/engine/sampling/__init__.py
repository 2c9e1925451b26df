"""From logits to tokens, batched: penalties, masks, truncation, seeded draws and logprobs."""
