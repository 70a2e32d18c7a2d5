"""Types of the stage graph and of what a stage asks of the plan. Imports errors, facts and lower.layer only."""
