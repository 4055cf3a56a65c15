"""A live view of the memory, in a browser: `dashboard_router(llm)` is all of it."""

from vtoken.server.dashboard.router import dashboard_router

__all__ = ["dashboard_router"]
