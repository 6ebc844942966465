"""Rows and tokens: dataset formats, chat templates, sampling. Import the modules; nothing is loaded here."""
