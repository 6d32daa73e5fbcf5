"""Errors as clients see them: a status, and OpenAI's body."""

from __future__ import annotations

from typing import Any

from hicache.errors import HiCacheError

RETRY_SECONDS = 1
"""What `Retry-After` says."""


class ApiError(HiCacheError):
    """The request ends with `status`. `param` names the field, `code` is one word for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (408, 413):  # the rest of the body is not wanted
            return {"connection": "close"}
        return {"retry-after": str(RETRY_SECONDS)} if self.status == 503 else {}

    def body(self) -> dict[str, Any]:
        """{"error": {...}}"""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request is wrong."""
    return ApiError(400, message, param, code)


def overloaded(message: str) -> ApiError:
    """503: not now; the same request may do later."""
    return ApiError(503, message, code="overloaded")


def stopping() -> ApiError:
    """503: the server ends."""
    return ApiError(503, "the server is shutting down", code="shutting_down")


def failed(message: str) -> ApiError:
    """500: it is not the client's fault."""
    return ApiError(500, message, code="internal_error")
