"""An OpenAI-compatible HTTP endpoint over the engine, see docs/serve.md.

    bodies → prompts → gateway, jobs → answers       what comes in, and what goes out
    app                                              routes, disconnects, event streams
    server                                           sockets, signals, shutdown

Only `app` and `server` need starlette and uvicorn.
"""
