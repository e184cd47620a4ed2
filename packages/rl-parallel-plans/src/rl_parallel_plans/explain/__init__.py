"""A plan as text, as JSON and as one HTML page. What the three show is counted once, in `report`."""
