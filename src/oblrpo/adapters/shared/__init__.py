"""What both adapters have."""
