"""Pictures of schedules and traces."""
