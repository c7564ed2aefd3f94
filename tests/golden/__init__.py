"""Programs, plans and C text of a few well-known functions, as files to read: what changed shows in a diff."""
