"""Plan to text: templates over a frozen context, checked before anything is written."""
