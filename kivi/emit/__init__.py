"""Printers that several backends share."""
