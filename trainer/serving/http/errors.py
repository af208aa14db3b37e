"""Errors that a client gets, in OpenAI's form."""

from typing import Any

OVERLOADED = {"Retry-After": "1"}  # seconds


class ApiError(Exception):
    """A refused or failed request.

    Parameters
    ----------
    status : the HTTP status.
    message : one sentence, which names the parameter, its value and what is accepted.
    param : the parameter that is at fault.
    code : a word that programs compare.
    headers : headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_value(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Returns the error for a parameter that is not accepted."""
    return ApiError(400, message, param=param, code=code)


def unavailable(reason: str) -> ApiError:
    """Returns the error for a server that takes no requests."""
    return ApiError(503, reason, code="unavailable", headers=OVERLOADED)
