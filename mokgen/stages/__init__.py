"""One file per stage kind: tensors, torch reference, requests to the plan. Torch only inside functions."""
