"""Makes the engine's requests of one turn of a conversation, and says how the answer's text is
parsed. Every chat API works through this."""

from __future__ import annotations

from dataclasses import dataclass

from setpoint.core import request as core
from setpoint.core.errors import RequestError
from setpoint.frontend.chat.parser import MakeParser, PlainParser
from setpoint.frontend.chat.prompt import chat_prompt
from setpoint.frontend.chat.request import ChatRequest
from setpoint.frontend.chat.tools import offered
from setpoint.frontend.service import Service


@dataclass(slots=True, frozen=True)
class PreparedChat:
    requests: list[core.Request]
    """The ``n`` requests of the turn."""
    make_parser: MakeParser
    """Makes the parser of one sequence's text."""


class Chat:
    """Prepares the chats of a service; it keeps nothing of them."""

    def __init__(self, service: Service) -> None:
        self._text = service.text
        self._intake = service.intake
        self._variables = service.config.chat_template_kwargs

    async def prompt_ids(self, request: ChatRequest) -> core.Ids:
        """The token ids of the conversation, for whoever counts them or generates in another way.
        Raises RequestError (400)."""
        prompt = await chat_prompt(request, self._text, self._variables)
        # The template writes the special tokens itself.
        return await self._intake.encode(prompt, add_special_tokens=False)

    async def prepare(self, request: ChatRequest, *, rid: str) -> PreparedChat:
        """Check, render and tokenize a turn; nothing runs yet. Raises RequestError (400) for one
        that cannot be honoured."""
        if offered(request):
            raise RequestError("tools are not supported by this server yet.")
        ids = await self.prompt_ids(request)
        requests = self._intake.requests(ids, request.sampling, request.options, rid=rid)
        return PreparedChat(requests, PlainParser)
