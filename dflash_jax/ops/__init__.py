"""Pure maths on arrays; nothing here knows Flax, a model or a checkpoint."""
