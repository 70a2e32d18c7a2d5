"""Artifact to operator: loads objects and manifests, launches, needs no compiler."""
