"""Which tokens run next: requests, pages, prefix cache, policy and packing. numpy only; no device, no text."""
