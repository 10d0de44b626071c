"""Running programs: transport, engine, gradient synchronisation, localised state."""
