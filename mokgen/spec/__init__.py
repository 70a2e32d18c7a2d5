"""The spec: what a user says about a layer, as frozen pydantic models, and the loader that reads it from YAML."""
