"""Moving chunks between processes: sessions, queues, the vans and the thread that runs them."""
