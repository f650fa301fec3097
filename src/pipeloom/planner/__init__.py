"""Planning: search for the fastest layout, and the reasons for it."""
