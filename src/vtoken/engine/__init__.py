"""The face: requests in, answers out."""
