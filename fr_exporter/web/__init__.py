"""What people and programs read over HTTP: the landing page, the JSON API, the health endpoints."""
