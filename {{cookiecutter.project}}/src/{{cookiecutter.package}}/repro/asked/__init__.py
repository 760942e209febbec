"""What was asked for: settings, content address, data manifest. These files load without torch, in a blink."""
