"""Every way a request can end badly.  Each error knows its HTTP status, its OpenAI `type` and its `code`.

Messages are read by clients: they name the field and the numbers, never a path, an address or a traceback.
"""

from __future__ import annotations

from typing import Self


class MmserveError(Exception):
    """A request failed.  `param` names the field at fault, `retry_after_s` when trying again makes sense."""

    status = 500
    type = "internal_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.param, self.code, self.retry_after_s))

    def again(self, *, param: str | None = None) -> Self:
        """The same for another request: what a shared failure is raised as.  It names `param`, if this one named a field."""
        param = None if self.param is None else param
        return type(self)(self.message, param=param, code=self.code, retry_after_s=self.retry_after_s)

    def body(self) -> dict[str, object]:
        """The `{"error": ...}` object of every route.  Words of a client's that are no text come escaped: no encoding holds them."""
        param = None if self.param is None else _as_text(self.param)
        return {"error": {"message": _as_text(self.message), "type": self.type, "param": param, "code": self.code}}


def _as_text(words: str) -> str:
    return words.encode("utf-8", "backslashreplace").decode()


def _rebuild(kind: type[MmserveError], message: str, param: str | None, code: str, retry_after_s: float | None) -> MmserveError:
    return kind(message, param=param, code=code, retry_after_s=retry_after_s)


class BadRequest(MmserveError):
    status = 400
    type = code = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class InvalidApiKey(MmserveError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(MmserveError):
    """Not from there: a foreign `Host`, or a page of another site."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class ModelNotFound(MmserveError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class NotFound(MmserveError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class RequestTimeout(MmserveError):
    status = 408
    type = code = "request_timeout"


class TooLarge(MmserveError):
    """The body, a picture, a clip, or a prompt that the KV cache could not hold even when empty."""

    status = 413
    type = "invalid_request_error"
    code = "too_large"


class UnsupportedMedia(MmserveError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class UndecodableMedia(MmserveError):
    status = 422
    type = "invalid_request_error"
    code = "undecodable_media"


class ContentQuarantined(MmserveError):
    """The same content ended workers a while ago."""

    status = 422
    type = "invalid_request_error"
    code = "content_quarantined"


class KeyReused(MmserveError):
    """An `Idempotency-Key` that came with another request before."""

    status = 422
    type = "invalid_request_error"
    code = "idempotency_key_reused"


class RateLimited(MmserveError):
    status = 429
    type = code = "rate_limit_exceeded"


class Overloaded(MmserveError):
    """The server can't take this now; `Retry-After` says when to come back."""

    status = 503
    type = code = "overloaded"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message, param=param, code=code, retry_after_s=retry_after_s)


class EncoderUnavailable(Overloaded):
    """This kind of media can't be encoded now, whatever is in it: its encoder failed too often, or told us to stay away."""

    code = "encoder_unavailable"


class EncoderFailed(MmserveError):
    """The encoder gave rows that must not be used (`encoder_nan`) or could not encode this item at any batch size."""

    code = "encoder_failed"


class NumericalError(MmserveError):
    code = "numerical_error"


class WorkerLost(MmserveError):
    """Workers died over this request: twice among others, and once over it alone."""

    code = "worker_lost"


class WorkerDied(Exception):
    """A worker process is gone: its channel closed, or it was killed for making no progress.  Cured in `engine`."""


class OutOfBlocks(Exception):
    """The KV cache has no free block.  Cured in `scheduler`, by preemption."""


class OutOfBuffer(Exception):
    """The shared buffer has no room for the rows.  Cured in `encoders`, by eviction or waiting."""


ENCODER_FAULTS = (EncoderUnavailable, EncoderFailed, WorkerLost)
"""What ends a media item through no fault of its own: a request that allows it is answered without the item."""
