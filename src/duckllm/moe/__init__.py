"""Routing, and the experts that the host calls: remote (dispatch, combine) or in this process."""
