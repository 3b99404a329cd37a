"""An allocation trace in memory, and its CSV form."""

HEADER = "tick,event,id,bytes,stream,iteration,phase,microbatch,chunk,module,dynamic"


class Trace:
    """The events of one job, in order, and the bytes that are live.

    `iteration`, `phase`, `micro_batch` and `is_dynamic` describe the job's position; each event
    takes them over. A request is named by the number that `alloc` returns.
    """

    def __init__(self):
        self.events = []
        self.requests = 0
        self.live = {}  # by request: bytes, stream and module
        self.live_bytes = self.peak_bytes = 0
        self.iteration, self.phase, self.micro_batch, self.is_dynamic = 0, "init", "", False

    def add_event(self, event, request, size, stream, module, is_dynamic):
        position = self.iteration, self.phase, self.micro_batch
        self.events.append((event, request, size, stream, *position, module, is_dynamic))

    def alloc(self, size: float, module="", stream=0, is_dynamic: bool | None = None) -> int:
        """Allocates `size` bytes, at least one, and returns the request."""
        size = max(1, int(size))
        request = self.requests
        self.requests += 1
        is_dynamic = self.is_dynamic if is_dynamic is None else is_dynamic
        self.add_event("alloc", request, size, stream, module, int(is_dynamic))
        self.live[request] = size, stream, module
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return request

    def free(self, *requests):
        """Frees requests in order: numbers, lists of them, or None for a tensor that is absent."""
        for request in requests:
            if isinstance(request, list):
                self.free(*request)
            elif request is not None:
                size, stream, module = self.live.pop(request)
                self.live_bytes -= size
                self.add_event("free", request, "", stream, module, "")

    def alloc_and_free(self, size: float, module=""):
        """Allocates a temporary that the next operator does not need."""
        self.free(self.alloc(size, module))

    def record_stream(self, request: int, stream: int):
        """Records the use of a live request on another stream than its own."""
        self.add_event("record_stream", request, "", stream, self.live[request][2], "")

    def write(self, out, has_record_stream=True):
        """Writes the CSV, with or without its `record_stream` rows."""
        out.write(f"{HEADER}\n")
        tick = 0
        for event, request, size, stream, *position, module, is_dynamic in self.events:
            if event == "record_stream" and not has_record_stream:
                continue
            tick += 1
            iteration, phase, micro_batch = position
            out.write(f"{tick},{event},{request},{size},{stream},")
            out.write(f"{iteration},{phase},{micro_batch},,{module},{is_dynamic}\n")
