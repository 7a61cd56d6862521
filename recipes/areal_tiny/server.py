"""An inference server for AReaL on a CPU: transformers, behind the endpoints of AReaL's vLLM
server.

AReaL extends the server of one release of vLLM, of which there is no build for this torch on a CPU.
``python -m recipes.areal_tiny.server MODEL`` prints its port.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Reply = dict[str, Any]


class Model:
    """Weights that are replaced while the server runs."""

    def __init__(self, path: str) -> None:
        self._lock = Lock()
        self._model = AutoModelForCausalLM.from_pretrained(path)

    def load(self, path: str) -> Reply:
        """Take the weights of a folder."""
        with self._lock:
            self._model = AutoModelForCausalLM.from_pretrained(path)
        return {"success": True, "message": path}

    @torch.no_grad()
    def complete(self, request: Reply) -> Reply:
        """Sample a completion of a prompt of token ids, with the log-probability of each token."""
        prompt = torch.tensor([request["prompt"]])
        with self._lock:
            made = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                top_k=0,
                temperature=request["temperature"],
                max_new_tokens=request["max_tokens"],
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = made.sequences[0, prompt.shape[1] :].tolist()
        rows = [logits[0].log_softmax(-1) for logits in made.logits]
        ended = tokens[-1] == self._model.generation_config.eos_token_id
        return {
            "choices": [
                {
                    "finish_reason": "stop" if ended else "length",
                    "logprobs": {
                        "tokens": [f"token:{token}" for token in tokens],
                        "token_logprobs": [
                            float(row[token]) for row, token in zip(rows, tokens, strict=True)
                        ],
                    },
                }
            ]
        }


class Handler(BaseHTTPRequestHandler):
    """One request."""

    model: Model

    def do_GET(self) -> None:
        """Answer that the server is there."""
        self._reply({})

    def do_POST(self) -> None:
        """Answer what AReaL's client asks for;
        pausing is for servers with many requests at once.
        """
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/completions":
            self._reply(self.model.complete(request))
        elif self.path == "/areal_update_weights":
            self._reply(self.model.load(request["model_path"]))
        else:
            self._reply({"success": True, "message": self.path})

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _reply(self, reply: Reply) -> None:
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Handler.model = Model(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
