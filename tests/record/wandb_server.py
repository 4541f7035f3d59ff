"""A stand-in for a W&B server on 127.0.0.1, enough for an online run and a dashboard: prints its port, then
the views (workspaces, reports) that it is sent, one JSON object a line; serves two minutes.

With a fault as its argument it does badly: `garbage` (a web page for an answer), `error` (status 500),
`refuses` (status 403), `slow` (seconds for every answer), `silent` (none). With `later-` before it, it takes
a run first, and does badly from the first metrics on.
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SLOW_S = 1.5
_USER = {"id": "u1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
_VERSION = {"cliVersionInfo": {"max_cli_version": "9.9.9"}, "latestLocalVersionInfo": None, "features": []}


class Handler(BaseHTTPRequestHandler):
    """Answers /graphql by the words in the query, everything else with an empty success."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        """Quiet."""

    fault = ""
    later = False

    def do_GET(self):
        self._answer({})

    def do_PUT(self):
        self._body()
        self._answer({})

    def do_POST(self):
        body = self._body()
        if not self.path.endswith("graphql"):
            Handler.later = False  # metrics
            return self._answer({"exitcode": None, "limits": {}})
        request = json.loads(body)
        query, data = request.get("query", ""), {}
        if "viewer" in query:
            data["viewer"] = _USER
        if "serverInfo" in query:
            data["serverInfo"] = _VERSION
        if "upsertBucket" in query:
            project = {"id": "p1", "name": "p", "entity": {"id": "e1", "name": "me"}}
            bucket = {
                "id": "b1",
                "name": request["variables"].get("name") or "r",
                "displayName": "r",
                "config": "{}",
            }
            bucket |= {"description": None, "sweepName": None, "historyLineCount": 0, "project": project}
            data["upsertBucket"] = {"bucket": bucket, "inserted": True}
        if "upsertView" in query:
            given = request["variables"]
            print(json.dumps({"type": given["type"], "spec": json.loads(given["spec"])}), flush=True)
            project = {"id": "p1", "name": given["projectName"], "entityName": given["entityName"]}
            view = {key: given[key] for key in ("name", "displayName", "description", "type", "spec")}
            data["upsertView"] = {"view": {"id": "v1", "project": project, **view}, "inserted": True}
        if "createRunFiles" in query:  # wandb-core dies of an answer without it
            names = request["variables"]["files"]
            port = self.server.server_address[1]
            files = [{"name": name, "uploadUrl": f"http://127.0.0.1:{port}/upload"} for name in names]
            data["createRunFiles"] = {"runID": "b1", "uploadHeaders": [], "files": files}
        if "models(" in query:
            data["models"] = {
                "pageInfo": {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False},
                "edges": [],
            }
        if "model(" in query or "bucket(" in query:
            data |= {"model": None, "project": None}
        return self._answer({"data": data})

    def _body(self) -> bytes:
        if self.headers.get("Content-Length"):
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []  # chunked
        while size := int(self.rfile.readline().strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, data: dict) -> None:
        body, status = json.dumps(data).encode(), 200
        fault = "" if self.later else self.fault
        if fault == "garbage":
            body = b"<html>\0 Welcome to the hotel's network"
        elif fault in ("error", "refuses"):
            body, status = b"no", 500 if fault == "error" else 403
        elif fault:
            time.sleep(SLOW_S if fault == "slow" else 600)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    fault = sys.argv[1] if len(sys.argv) > 1 else ""
    Handler.fault, Handler.later = fault.removeprefix("later-"), fault.startswith("later-")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Timer(120, server.shutdown).start()
    print(server.server_address[1], flush=True)
    server.serve_forever()
