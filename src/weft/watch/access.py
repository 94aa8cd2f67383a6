"""Access to live pages: requests to a name of this machine, with the token that the server has printed."""

from __future__ import annotations

import secrets
from http.cookies import SimpleCookie

from starlette.datastructures import URL, Headers, QueryParams
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
REFUSED = "weft watch: open the address that the command has printed; it has a token\n"


class TokenRequired:
    """Refuse requests without the token: in a cookie, as a bearer token, or once in the address.

    A token in the address becomes a cookie, and the browser goes on without it. Addresses are seen by many.
    Pages of other sites cannot send the cookie (SameSite). A name of another machine is refused, wherever it
    leads. So no page of such a name can read the answers.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = TrustedHostMiddleware(app, allowed_hosts=LOOPBACK_NAMES, www_redirect=False)
        self._token, self._cookie = token, f"weft_watch_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
        elif self._is_token(QueryParams(scope["query_string"]).get("token", "")):
            answer = RedirectResponse(URL(scope=scope).remove_query_params("token"), status_code=303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            await answer(scope, receive, send)
        else:
            await PlainTextResponse(REFUSED, status_code=403)(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        told = bearer.strip() if kind.lower() == "bearer" else ""
        return self._is_token(told) or (cookie is not None and self._is_token(cookie.value))

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self._token.encode())
