"""Arms: several confirmed settings of one model and plain decoding, chosen round by round by what they do where they run.

Imports the decoder and what it decodes with; knows no server.
"""
