"""The library behind `import tokenmill`: one pipeline from a model to a finished batch.

    options, run_options, tune_options   the options of all functions
    planning       model + machine + options -> `Plan`, with the operating point and calibration applied
    command_plan   the plan of a command line; download_outlook: of a model before it is downloaded
    inspecting     `probe` and `inspect`: machine facts and model facts
    engines        which engine a batch runs on: a running one, one behind a URL, or a new one
    single_engine  one engine that serves its own HTTP interface
    batch_engine   the engine of a run, opened when needed; slots: its slots and KV layout, fitted to a batch
    sources        jobs in any form -> a job file
    batches        jobs -> durable batch -> results: `run` and `submit`
    workers        `work` on the batches of a store; cluster: a batch on the nodes of a Ray cluster
    stores         addresses of batch stores, `open_store`; summary: the result of a run
    loaded         `load`: an engine with blocking methods; background: the event loop behind it
    tuning         `tune`; tokens: counts tokens without an engine
    progress       progress events and the logger; display: the progress bar; stopping: graceful shutdown

`serve` is in `tokenmill.gateway.service`. Nothing here prints or exits; messages go to the logger `tokenmill`.
"""
