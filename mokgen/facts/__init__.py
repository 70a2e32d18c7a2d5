"""Constants of the world: architectures, formats, activations, error budgets. A leaf; torch only inside functions."""
