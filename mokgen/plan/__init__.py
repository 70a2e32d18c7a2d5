"""StageGraph to LayerPlan: tiles, tasks, regions, roles, pipelines and launch numbers as plain data. No torch, no cutlass."""
