"""Running things that answer: how engines are spelled, started and watched."""
