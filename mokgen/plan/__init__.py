"""StageGraph to LayerPlan: tiles, tasks, regions, roles, pipelines, launch numbers as plain data. No torch."""
