"""What runs on the machine that holds the KV: the store, the copies, the forward pass, the draws."""
