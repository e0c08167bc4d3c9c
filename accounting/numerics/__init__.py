"""The mathematics under the accountants; nothing here knows an event."""
