"""The backend end to end: models, modes and everything torch.compile users do."""
